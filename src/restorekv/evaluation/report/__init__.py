"""One page of tables and charts from what a run left on disk, and the pages that others make of the same blocks."""
