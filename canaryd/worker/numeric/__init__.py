"""Operations on a device whose results are known exactly, or are recorded and compared with later results."""
