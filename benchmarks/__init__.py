"""Speed, measured side by side: `python -m benchmarks.NAME`. Never a timed test."""
