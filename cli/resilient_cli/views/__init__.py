"""What the checkpoint commands found, as answers: a JSON document and its human form each."""
