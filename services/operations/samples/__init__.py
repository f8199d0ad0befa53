"""The sample log of a run: Parquet files below its folder, read without a server (docs/samples.md)."""
