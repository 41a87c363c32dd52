"""The golden pack: fixed goldens as files that any runtime can run without canaryd (docs/pack.md)."""
