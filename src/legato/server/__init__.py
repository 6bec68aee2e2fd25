"""The HTTP server: the application, its routes, and what stands around every request (keys, usage, telemetry).

Here is what answers requests over HTTP. Vendors' wire formats are in `dialects`, planning and running of Jobs in `run`,
SQL in `storage`.
"""
