"""Engines: what turns a Job into Steps. Siblings here do not import each other."""
