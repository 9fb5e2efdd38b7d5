-- Room for a claim on the page of its run: new row versions stay where the old ones are, which
-- spares a lock record and part of the row in the log, and a second page to write.
ALTER TABLE fencepost.run_queue SET (fillfactor = 45);
