"""Dialects: parse bytes' JSON into a `CompletionRequest`, encode events as one vendor's wire format. Siblings do not
import each other.
"""
