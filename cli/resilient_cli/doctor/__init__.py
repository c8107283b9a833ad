"""What `resilient doctor` looks at; none of it imports torch."""
