"""Models by name: what there is (`catalog.toml`), and how it comes into the data folder.

Here is what downloads and checks files. Nothing here loads a model.
"""
