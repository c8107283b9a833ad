"""Worker processes of this host, one per rank: their start, bootstrap code and fork server."""
