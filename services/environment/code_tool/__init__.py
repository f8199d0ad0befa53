"""The built-in tool `python`: code that the policy writes, in a process that can harm nothing."""
