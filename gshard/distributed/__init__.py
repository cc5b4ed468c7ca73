"""Several processes: who is who, how they meet, and how they end together."""
