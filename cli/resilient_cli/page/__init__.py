"""HTML page of a run, which loads no script, font or image from elsewhere."""
