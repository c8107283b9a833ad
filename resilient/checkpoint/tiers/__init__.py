"""A near repository and a durable one behaving as one store."""
