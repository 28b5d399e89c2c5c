"""Tells reports from other files, so that an earlier report may be replaced and nothing else.

A file is a report when it says so in its first bytes, as both renderers write it.
"""

HTML_MARK = '<meta name="generator" content="ptqpipe report">'
MARKDOWN_MARK = "<!-- ptqpipe report -->"


def is_report(head: bytes) -> bool:
    """Whether a file that begins with ``head`` is one that ptqpipe wrote."""
    return any(mark.encode() in head for mark in (HTML_MARK, MARKDOWN_MARK))
