"""What a run has used and computed: tokens, losses, memory."""
