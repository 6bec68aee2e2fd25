"""What outlives the process: keys, usage and journals, in one database.

All SQL is here, behind methods that receive and return values. Nothing here knows requests, HTTP, models or engines.
"""
