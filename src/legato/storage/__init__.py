"""What outlives the process: keys, usage and journals, in one database.

Here is all SQL, and nothing else is: methods receive and return values. Nothing here knows requests or HTTP.
"""
