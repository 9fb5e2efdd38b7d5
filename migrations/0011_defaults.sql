-- What applies to the runs of a tenant's jobs where neither job nor run says so: the fields of
-- its retry policy that were set. NULL: none.

ALTER TABLE fencepost.tenants ADD COLUMN default_retry_policy jsonb;
