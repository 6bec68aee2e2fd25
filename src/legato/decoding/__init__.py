"""Which token may follow, and which one does: from ids and rows of logits to ids.

Here is what every engine that has rows of logits shares: the seam, the sampler, the choice and the grammars. Nothing
here computes a row, knows a request or does I/O, but for the one process that tries constraints.
"""
