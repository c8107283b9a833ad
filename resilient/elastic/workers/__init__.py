"""Worker processes of the ranks of this host: start, fork server and first code."""
