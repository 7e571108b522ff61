CREATE TABLE runs (
    id INTEGER PRIMARY KEY,
    name TEXT NOT NULL UNIQUE,
    first_iteration BIGINT NOT NULL,
    last_iteration BIGINT NOT NULL,
    iterations BIGINT NOT NULL,
    partial BIGINT NOT NULL,
    world_size INTEGER NOT NULL,
    consumed_tokens BIGINT NOT NULL,
    started_ns BIGINT NOT NULL,
    last_ended_ns BIGINT NOT NULL
);

-- When each session began, and its first iteration that was stored: earlier sessions end before it.
CREATE TABLE sessions (
    run INTEGER NOT NULL,
    session_ns BIGINT NOT NULL,
    first_iteration BIGINT NOT NULL,
    PRIMARY KEY (run, session_ns)
);

-- The ledger: what is stored, and is never stored twice.
CREATE TABLE iterations (
    run INTEGER NOT NULL,
    iteration BIGINT NOT NULL,
    session_ns BIGINT NOT NULL,
    world_size INTEGER NOT NULL,
    num_ranks INTEGER NOT NULL,
    missing INTEGER[] NOT NULL,
    ended_ns BIGINT NOT NULL,
    seconds DOUBLE PRECISION NOT NULL,
    consumed_tokens BIGINT NOT NULL,
    dropped BIGINT NOT NULL,
    PRIMARY KEY (run, iteration)
);

CREATE TABLE events (
    run INTEGER NOT NULL,
    iteration BIGINT NOT NULL,
    number INTEGER NOT NULL,
    kind TEXT NOT NULL,
    detail TEXT NOT NULL,
    PRIMARY KEY (run, iteration, number)
);

CREATE TABLE alerts (
    run TEXT NOT NULL,
    number BIGINT NOT NULL,
    rule TEXT NOT NULL,
    severity TEXT NOT NULL,
    subject TEXT NOT NULL,
    layer INTEGER,
    item INTEGER,
    since_iteration BIGINT NOT NULL,
    since_ns BIGINT NOT NULL,
    last_iteration BIGINT NOT NULL,
    ended_iteration BIGINT,
    value DOUBLE PRECISION NOT NULL,
    worst DOUBLE PRECISION NOT NULL,
    threshold DOUBLE PRECISION NOT NULL,
    saw TEXT NOT NULL,
    cause TEXT NOT NULL,
    remedy TEXT NOT NULL,
    wants_checkpoint BOOLEAN NOT NULL,
    PRIMARY KEY (run, number)
);

-- What rows of the levels are about. kind 0: aggregates of a metric and layer, items are the metric's. kind 1: a derived
-- figure, layer is -1 and item i is layer i - 1.
CREATE TABLE series (
    id INTEGER PRIMARY KEY,
    run INTEGER NOT NULL,
    kind INTEGER NOT NULL,
    name TEXT NOT NULL,
    layer INTEGER NOT NULL,
    width INTEGER NOT NULL,
    UNIQUE (run, kind, name, layer)
);

-- Rows of level 1 are iterations, those of level F buckets of F iterations from `iteration` on; see rollup.py and
-- packing.py. Lists have one element an item, `width` of them. A count_* of one element holds for all items; a NULL
-- statistic is what the mean says. min_low is min_value, max_high is max_value. count_value of a bucket is the
-- sum over its iterations.
-- Lists are kept as they are: floats do not compress.
CREATE TABLE level_1 (
    series INTEGER NOT NULL,
    iteration BIGINT NOT NULL,
    width INTEGER NOT NULL,
    count_value INTEGER[],
    mean_value REAL[],
    rms_value REAL[],
    min_value REAL[],
    median_value REAL[],
    max_value REAL[],
    p99_value REAL[],
    which INTEGER[],
    PRIMARY KEY (series, iteration)
);
ALTER TABLE level_1
    ALTER count_value SET STORAGE EXTERNAL,
    ALTER mean_value SET STORAGE EXTERNAL,
    ALTER rms_value SET STORAGE EXTERNAL,
    ALTER min_value SET STORAGE EXTERNAL,
    ALTER median_value SET STORAGE EXTERNAL,
    ALTER max_value SET STORAGE EXTERNAL,
    ALTER p99_value SET STORAGE EXTERNAL,
    ALTER which SET STORAGE EXTERNAL;

CREATE TABLE level_16 (
    series INTEGER NOT NULL,
    iteration BIGINT NOT NULL,
    width INTEGER NOT NULL,
    iterations INTEGER NOT NULL,
    count_value INTEGER[],
    count_low INTEGER[],
    count_high INTEGER[],
    mean_value REAL[],
    mean_low REAL[],
    mean_high REAL[],
    rms_value REAL[],
    rms_low REAL[],
    rms_high REAL[],
    min_value REAL[],
    min_high REAL[],
    median_value REAL[],
    median_low REAL[],
    median_high REAL[],
    max_value REAL[],
    max_low REAL[],
    p99_value REAL[],
    p99_low REAL[],
    p99_high REAL[],
    PRIMARY KEY (series, iteration)
);
ALTER TABLE level_16
    ALTER count_value SET STORAGE EXTERNAL,
    ALTER count_low SET STORAGE EXTERNAL,
    ALTER count_high SET STORAGE EXTERNAL,
    ALTER mean_value SET STORAGE EXTERNAL,
    ALTER mean_low SET STORAGE EXTERNAL,
    ALTER mean_high SET STORAGE EXTERNAL,
    ALTER rms_value SET STORAGE EXTERNAL,
    ALTER rms_low SET STORAGE EXTERNAL,
    ALTER rms_high SET STORAGE EXTERNAL,
    ALTER min_value SET STORAGE EXTERNAL,
    ALTER min_high SET STORAGE EXTERNAL,
    ALTER median_value SET STORAGE EXTERNAL,
    ALTER median_low SET STORAGE EXTERNAL,
    ALTER median_high SET STORAGE EXTERNAL,
    ALTER max_value SET STORAGE EXTERNAL,
    ALTER max_low SET STORAGE EXTERNAL,
    ALTER p99_value SET STORAGE EXTERNAL,
    ALTER p99_low SET STORAGE EXTERNAL,
    ALTER p99_high SET STORAGE EXTERNAL;

CREATE TABLE level_256 (
    series INTEGER NOT NULL,
    iteration BIGINT NOT NULL,
    width INTEGER NOT NULL,
    iterations INTEGER NOT NULL,
    count_value INTEGER[],
    count_low INTEGER[],
    count_high INTEGER[],
    mean_value REAL[],
    mean_low REAL[],
    mean_high REAL[],
    rms_value REAL[],
    rms_low REAL[],
    rms_high REAL[],
    min_value REAL[],
    min_high REAL[],
    median_value REAL[],
    median_low REAL[],
    median_high REAL[],
    max_value REAL[],
    max_low REAL[],
    p99_value REAL[],
    p99_low REAL[],
    p99_high REAL[],
    PRIMARY KEY (series, iteration)
);
ALTER TABLE level_256
    ALTER count_value SET STORAGE EXTERNAL,
    ALTER count_low SET STORAGE EXTERNAL,
    ALTER count_high SET STORAGE EXTERNAL,
    ALTER mean_value SET STORAGE EXTERNAL,
    ALTER mean_low SET STORAGE EXTERNAL,
    ALTER mean_high SET STORAGE EXTERNAL,
    ALTER rms_value SET STORAGE EXTERNAL,
    ALTER rms_low SET STORAGE EXTERNAL,
    ALTER rms_high SET STORAGE EXTERNAL,
    ALTER min_value SET STORAGE EXTERNAL,
    ALTER min_high SET STORAGE EXTERNAL,
    ALTER median_value SET STORAGE EXTERNAL,
    ALTER median_low SET STORAGE EXTERNAL,
    ALTER median_high SET STORAGE EXTERNAL,
    ALTER max_value SET STORAGE EXTERNAL,
    ALTER max_low SET STORAGE EXTERNAL,
    ALTER p99_value SET STORAGE EXTERNAL,
    ALTER p99_low SET STORAGE EXTERNAL,
    ALTER p99_high SET STORAGE EXTERNAL;
