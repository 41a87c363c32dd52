"""The golden pack: products with right results, as files that any runtime can run without canaryd (docs/lab.md)."""
