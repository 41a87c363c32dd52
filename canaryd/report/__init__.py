"""What people read: status, history, gate, pages."""
