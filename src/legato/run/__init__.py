"""From a `CompletionRequest` to the events of its answer: models, plans, places and rounds.

Here is what decides how a request is computed and what becomes of its Steps. Nothing here knows a dialect, HTTP or
the database.
"""
