"""What is called as training goes on, and the callbacks that come with it."""
