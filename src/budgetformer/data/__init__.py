"""Files and named data sets -> examples -> token ids -> batches."""
