"""From the bytes that an engine writes to the text that a caller reads, piece by piece.

Here is what looks at an answer's bytes and characters: heal bytes, channels, UTF-8, stops, where an infill ends,
cycles. Nothing here knows logits, requests or wire formats, and nothing does I/O.
"""
