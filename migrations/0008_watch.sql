-- What watchers of runs must agree on, beside until when changes are told.

ALTER TABLE fencepost.shard_state
    -- Rises whenever telling begins again after a time in which nobody watched: what happened
    -- meanwhile was not told to anybody.
    ADD COLUMN watch_epoch       bigint NOT NULL DEFAULT 0,
    -- Told changes of transactions up to this one may have been pruned.
    ADD COLUMN changes_pruned_to xid8 NOT NULL DEFAULT '0';
