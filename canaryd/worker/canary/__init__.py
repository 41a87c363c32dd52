"""The user's own model: its fingerprint, and how it runs in this process."""
