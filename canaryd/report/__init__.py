"""Texts that people read: status, history, gate, pages."""
