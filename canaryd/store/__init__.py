"""The records that canaryd keeps, in one SQLite file."""
