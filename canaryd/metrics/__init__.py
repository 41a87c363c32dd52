"""The metric families of canaryd, and their exposition."""
