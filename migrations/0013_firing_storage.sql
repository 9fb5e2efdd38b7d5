-- Room for what firing writes. All jobs of a page can be due at one instant, so a page has room
-- for a second version of each of its rows: a version that stays in its page costs the log only
-- what has changed in it, and the image of a page holds half as much. Pages that are full
-- already get there fire by fire.
ALTER TABLE fencepost.job_schedules SET (fillfactor = 50);
