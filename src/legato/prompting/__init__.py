"""From what was asked to the token ids that an engine reads.

Here is what lays out chats, raw prompts and infills, and what is known about a model for that. Nothing here chooses a
token, and nothing knows an engine or a wire format.
"""
