"""Test processes with torch, DeepSpeed, transformers and vLLM already imported, as children of their caller.

`starter.py` stands in for what `subprocess` does to start `python -m <module>`; `zygote.py` is the process that has imported
everything and forks. What is forked is a process like any other: a child of whoever asked for it, with its own command line,
signals, group and exit code.
"""
