"""The user's own model: its fingerprint, and the code that runs it in this process."""
