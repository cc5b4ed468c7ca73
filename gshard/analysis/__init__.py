"""What a step needs and communicates: audit, explain, forecast, tune."""
