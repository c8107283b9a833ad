"""Two checkpoints side by side: of any layout, any world size, anywhere, in constant memory."""
