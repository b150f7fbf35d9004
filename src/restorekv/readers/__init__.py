"""Files as text: PDF, DOCX, EPUB, HTML and plain text, all but the last in a process with bounds on
memory and time.
"""
