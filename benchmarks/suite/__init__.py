"""All benchmarks: what they measure, how they are run together, and the page of their results."""
