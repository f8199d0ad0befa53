-- Steps: prepare, commit, publish, discard damaged groups, and retire what a checkpoint covers.
-- reads and writes: run, ledger, replay:*, deadletter, drops, departed, metrics, group:<group>, payload:<payload>
-- owns:             step:<s>        hash    plan; rank:<r>; groups; fresh (groups that train for the first time); departed; gaps
--                                           (filtered groups that had their place in it, and their sequences)
--                   trained:<epoch> bitmap  dataset rows that were trained

-- Return why `prepare` must reject these groups: duplicate, missing, stale, or not the ones the clocks ring for.
local function unfit(t, groups, oldest)
  local seen = {}
  for _, group in ipairs(groups) do
    local version = redis.call('ZSCORE', t.key .. 'version', group)
    if not version then return 'is not in the replay table', group end
    if seen[group] then return 'is drawn twice', group end
    if math.floor(tonumber(version) / SHIFT) < oldest then return 'is stale', group end
    seen[group] = true
  end
  if t.clocked then
    for _, group in ipairs(first_groups(t, #groups)) do
      if not seen[group] then return 'rings before those that were drawn', group end
    end
  end
end

-- args: leader fence, step, oldest version that is fresh, groups, variates (Exp(1), one per group), sequence up to which filtered
-- groups had their place in this step, plan, then the plan of each rank. Lists are separated by spaces.
-- Returns 1 if prepared, now or by an earlier call with the same plan; rejected unless `step` follows the last prepared one and
-- the groups are fit. Counts uses; a group that reached max_uses leaves.
register_leader('prepare', {
  'step', NATURAL, 'oldest fresh', NATURAL, 'groups', TEXT, 'variates', TEXT, 'gaps until', INTEGER, 'plan', TEXT, EACH, 'rank plan', TEXT,
}, function(prefix, args)
  local step, plan = tonumber(args[2]), args[7]
  local key, prepared = prefix .. ':step:' .. step, number(prefix, 'prepared_step')
  if redis.call('HGET', key, 'plan') == plan then return 1 end
  if prepared ~= step - 1 then
    return redis.error_reply('OUTOFORDER step ' .. step .. ' does not follow prepared step ' .. prepared)
  end
  local t, groups, variates, fresh = open_table(prefix), words(args[4]), words(args[5]), {}
  if t.clocked and #variates ~= #groups then
    return redis.error_reply('INVALID ' .. #variates .. ' variates for ' .. #groups .. ' groups')
  end
  for _, variate in ipairs(variates) do
    if not VARIATE.fits(variate) then return redis.error_reply('INVALID variate ' .. variate .. ' is not ' .. VARIATE.is) end
  end
  local why, group = unfit(t, groups, tonumber(args[3]))
  if why then return redis.error_reply('OUTOFORDER group ' .. group .. ' ' .. why) end
  local departed = redis.call('LRANGE', prefix .. ':departed', 0, -1)
  if t.clocked then ring_clocks(t, groups, variates) end
  for _, group in ipairs(groups) do
    local uses = redis.call('HINCRBY', prefix .. ':group:' .. group, 'uses', 1)
    count_uses(t, uses - 1, -1)
    count_uses(t, uses, 1)
    if uses == 1 then fresh[#fresh + 1] = group end
    if t.max_uses > 0 and uses >= t.max_uses then
      leave_table(t, group)
      departed[#departed + 1] = group
    end
  end
  t.drawn = t.drawn + #groups
  close_table(t)
  redis.call('HSET', key, 'plan', plan, 'groups', args[4], 'fresh', table.concat(fresh, ' '), 'departed',
    table.concat(departed, ' '))
  for i = 8, #args do redis.call('HSET', key, 'rank:' .. (i - 8), args[i]) end
  redis.call('DEL', prefix .. ':departed')
  local gaps = redis.call('ZRANGE', t.key .. 'gaps', '-inf', args[6], 'BYSCORE', 'WITHSCORES')
  if #gaps > 0 then redis.call('HSET', key, 'gaps', table.concat(gaps, ' ')) end
  redis.call('ZREMRANGEBYSCORE', t.key .. 'gaps', '-inf', args[6])
  redis.call('HSET', prefix .. ':run', 'prepared_step', step)
  notify(prefix, 'steps')
  return 1
end)

-- args: trainer fence, step. Returns 1 if committed now, 0 if it was before: committing twice is harmless.
register_trainer('commit', {'step', INTEGER}, function(prefix, args)
  local step, committed = tonumber(args[2]), number(prefix, 'committed_step')
  if step <= committed then return 0 end
  if step ~= committed + 1 or step > number(prefix, 'prepared_step') then
    return redis.error_reply('OUTOFORDER step ' .. step .. ' does not follow committed step ' .. committed)
  end
  local fresh = words(redis.call('HGET', prefix .. ':step:' .. step, 'fresh'))
  local last_epoch = number(prefix, 'last_epoch')
  for _, group in ipairs(fresh) do
    local epoch, index = string.match(group, '^(%d+)-(%d+)$')
    if redis.call('SETBIT', prefix .. ':trained:' .. epoch, index, 1) == 1 then count(prefix, 'doubled', 1) end
    last_epoch = math.max(last_epoch, tonumber(epoch))
  end
  count(prefix, 'trained', #fresh)
  redis.call('HSET', prefix .. ':run', 'committed_step', step, 'last_epoch', last_epoch)
  notify(prefix, 'steps')
  return 1
end)

-- Remove groups from a list in a step's hash. Returns those that were in it.
local function without(key, field, groups)
  local kept, gone = {}, {}
  for _, group in ipairs(words(redis.call('HGET', key, field) or '')) do
    local list = groups[group] and gone or kept
    list[#list + 1] = group
  end
  if #gone > 0 then redis.call('HSET', key, field, table.concat(kept, ' ')) end
  return gone
end

-- Remove a group that cannot be trained from the table for good. `first`: the step that was to train it first, or nil if an
-- earlier step has trained it, which stays its outcome.
local function discarded(t, group, reason, first)
  local prefix = t.prefix
  local header = redis.call('HGET', prefix .. ':group:' .. group, 'header') or ''
  if redis.call('ZSCORE', t.key .. 'order', group) then leave_table(t, group) end
  redis.call('LREM', prefix .. ':departed', 0, group)
  delete_group(prefix, group)
  if not first then return dead_letter(prefix, group, reason, header) end
  if first <= number(prefix, 'committed_step') then
    local epoch, row = string.match(group, '^(%d+)-(%d+)$')
    redis.call('SETBIT', prefix .. ':trained:' .. epoch, row, 0)
    count(prefix, 'trained', -1)
  end
  if first >= number(prefix, 'published_version') then free_slots(prefix, 1) end
  keep_sample(prefix, group, 'failed:' .. reason, header, '')
  bury(prefix, group, reason, header)
end

-- Return the steps that `discard_damaged` is given, from args[at] on, {step, plan, ranks = plans of the ranks}; nil if they are
-- incomplete.
local function read_steps(args, at)
  local steps = {}
  while at <= #args do
    local step, ranks = {step = args[at], plan = args[at + 1], ranks = {}}, tonumber(args[at + 2])
    if not NATURAL.fits(step.step) or not ranks or at + 2 + ranks > #args then return end
    for rank = 1, ranks do step.ranks[rank] = args[at + 2 + rank] end
    steps[#steps + 1], at = step, at + 3 + ranks
  end
  return steps
end

-- args: trainer fence, the first step that is not in the trainer's weights, the last prepared one, number of groups, group and
-- reason of each; then of each step from the first on that has any of them: step, its plan without them, number of ranks, plan of
-- each.
-- The groups cannot be trained: they become dead letters and leave every coming step. Rejected if another step was prepared
-- meanwhile. A repeated call finds them in no step, and changes nothing. Returns how many became dead letters.
register_trainer('discard_damaged', {
  'first step', NATURAL, 'prepared step', INTEGER, 'damaged', NATURAL, EACH, 'group, reason or plan', TEXT,
}, function(prefix, args)
  local prepared, last = number(prefix, 'prepared_step'), 4 + 2 * tonumber(args[4])
  if prepared ~= tonumber(args[3]) then return redis.error_reply('OUTOFORDER step ' .. prepared .. ' was prepared meanwhile') end
  local steps = last <= #args and read_steps(args, last + 1)
  if not steps then return redis.error_reply('INVALID groups or plans: they are incomplete') end
  local bad, found, first, buried = {}, {}, {}, 0
  for i = 5, last, 2 do bad[args[i]] = true end
  for step = tonumber(args[2]), prepared do
    local key = prefix .. ':step:' .. step
    for _, group in ipairs(without(key, 'groups', bad)) do found[group] = true end
    for _, group in ipairs(without(key, 'fresh', bad)) do first[group] = step end
    without(key, 'departed', bad)
  end
  if not next(found) then return 0 end -- before the plans: they may have been retired since
  for _, each in ipairs(steps) do
    local key = prefix .. ':step:' .. each.step
    redis.call('HSET', key, 'plan', each.plan)
    for rank, plan in ipairs(each.ranks) do redis.call('HSET', key, 'rank:' .. (rank - 1), plan) end
  end
  local t = open_table(prefix)
  for i = 5, last, 2 do
    if found[args[i]] then
      discarded(t, args[i], args[i + 1], first[args[i]])
      buried = buried + 1
    end
  end
  close_table(t)
  notify(prefix, 'steps')
  return buried
end)

-- args: trainer fence, version. The fleet holds `version` of this trainer: frees the slots of the steps it contains. A trainer
-- that retrained a version publishes its own, and generators that hold the earlier trainer's stop claiming.
-- Returns 1 if published now, 0 if it was before.
register_trainer('publish', {'version', INTEGER}, function(prefix, args)
  local version, published = tonumber(args[2]), number(prefix, 'published_version')
  if version == published and redis.call('HGET', prefix .. ':run', 'published_by') ~= args[1] then
    redis.call('HSET', prefix .. ':run', 'published_by', args[1])
    notify(prefix, 'version')
  end
  if version <= published then return 0 end
  if version > number(prefix, 'committed_step') + 1 then
    return redis.error_reply('OUTOFORDER version ' .. version .. ' contains steps that are not committed')
  end
  for step = math.max(published, 0), version - 1 do
    free_slots(prefix, #words(redis.call('HGET', prefix .. ':step:' .. step, 'fresh')))
  end
  redis.call('HSET', prefix .. ':run', 'published_version', version, 'published_by', args[1])
  count(prefix, 'syncs', 1)
  notify(prefix, 'version')
  return 1
end)

-- args: trainer fence, step. A checkpoint covers everything up to and including `step`, which also satisfies pending requests for
-- one, unless later steps are committed. Never goes back. Returns 1 if it covers more than before, otherwise 0.
register_trainer('checkpointed', {'step', INTEGER}, function(prefix, args)
  local step, run = tonumber(args[2]), prefix .. ':run'
  if step >= number(prefix, 'committed_step') then redis.call('HDEL', run, 'checkpoint') end
  if step <= number(prefix, 'checkpointed_step') then return 0 end
  redis.call('HDEL', run, 'checkpoint_failed')
  redis.call('HSET', run, 'checkpointed_step', step)
  return 1
end)

local HELD_STEPS = 16 -- steps beyond those that a checkpoint needs that may wait for the sample log

-- Return whether a step that is to be deleted waits for the sample log; if it cannot wait, its groups count as missed.
local function awaits_log(prefix, step)
  local held = redis.call('HMGET', prefix .. ':samples:state', 'share', 'until_ms')
  if not held[1] or is_logged(prefix, step) then return false end
  if run_ms(prefix) < tonumber(held[2]) and number(prefix, 'checkpointed_step') - step < HELD_STEPS then return true end
  miss_step(prefix, step)
  return false
end

-- args: metrics of a step, entries to keep. Appends them to the stream `metrics`, even on a full server: the trainer frees its
-- memory. A repeated call appends them again; readers take the first of a step.
register('record', {'metrics', TEXT, 'kept', POSITIVE}, function(prefix, args)
  redis.call('XADD', prefix .. ':metrics', 'MAXLEN', '~', args[2], '*', 'm', args[1])
  return 1
end)

-- no args. Deletes the oldest plan that is covered by a checkpoint and published, with the groups that departed with it, once the
-- sample log has it. One step per call keeps the server responsive. Returns 1 if a step was retired, 0 if none is due.
register('retire', {}, function(prefix)
  local step = number(prefix, 'retired_step') + 1
  if step > number(prefix, 'checkpointed_step') or step >= number(prefix, 'published_version') then return 0 end
  if awaits_log(prefix, step) then return 0 end
  local key = prefix .. ':step:' .. step
  for _, group in ipairs(words(redis.call('HGET', key, 'departed'))) do delete_group(prefix, group) end
  redis.call('UNLINK', key)
  redis.call('HSET', prefix .. ':run', 'retired_step', step)
  return 1
end)
