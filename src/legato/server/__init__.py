"""The HTTP server: sockets in, dialects and the pipeline behind it."""
