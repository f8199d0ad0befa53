"""Sends what changed from GPUs to GPUs: `sync.encoding = "sparse"` (docs/sync.md). Nothing passes through host memory."""
