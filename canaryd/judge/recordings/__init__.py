"""Judge recorded goldens against their baselines."""
