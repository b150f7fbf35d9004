"""Files as text: PDF, DOCX, HTML and plain text, the first three in a process with bounds on memory
and time.
"""
