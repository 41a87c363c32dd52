"""Operations on a device whose results are exact, or recorded and compared."""
