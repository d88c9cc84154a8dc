"""One small file for each library that must share a rank with us."""
