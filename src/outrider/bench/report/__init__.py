"""Reports on the records of the suite: as markdown, as a web page, and against a baseline. Imports no torch."""
