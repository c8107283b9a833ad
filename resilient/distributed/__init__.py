"""Who we are among many, and small values passed between ranks."""
