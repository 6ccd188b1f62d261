"""Questions asked of a run. Plain data comes out; nothing here prints, and nothing here needs torch or ModelScope."""
