-- The replay table: how groups enter, are drawn, weighted and removed. Shared by replay.lua and steps.lua.
-- reads and writes: ledger, run, group:<group>, payload:<payload>
-- owns:             replay:order   zset  group -> issue sequence
--                   replay:version zset  group -> oldest policy version x 2^32 + issue sequence
--                   replay:clock:<n> zset  group -> time it rings next, for weights above 0; n grows with the weight
--                   replay:idle    zset  the same for groups of weight 0, which are drawn when nothing else is left
--                   replay:weight  zset  group -> sampling weight
--                   replay:state   hash  sampler, remover, capacity, max_uses; now:<n>, idle_now (the clocks' times); weight_sum,
--                                        weight_rest (its rounding error); inserted, drawn; base (recency); rescaling
--                                        "<new base> <factor> <sequence>"; uses:<n> groups that were drawn n times
--                   departed       list  groups that left the table after use; the next plan takes charge of their payload
--
-- Poisson clocks: a group of weight w rings at now + Exp(1)/w. The first to ring is group i with probability w_i / sum of w, and
-- by memorylessness no other clock changes when a group is drawn, enters, leaves or changes its weight. Groups of similar weights
-- share a sorted set with its own time: next to the rings of light groups, a double could not tell those of heavy ones apart.
-- Time passes equally in all sets.

local SHIFT = 4294967296
local LIGHTEST, HEAVIEST = 1e-9, 1e9 -- as in services/groups/replay_weights.py; lighter is 0
local CLOCKS, SPAN = 4, 16 -- sets of clocks, each for weights within a factor of 2^16; together for LIGHTEST to HEAVIEST
local SCALED_TOGETHER = 100 -- groups rescaled by one call: some milliseconds of the server's time
local LONGEST = 4294967296 -- mean rings of a group: up to this time a double resolves ring times to 2^-20 of one
local COUNTERS = {'now:1', 'now:2', 'now:3', 'now:4', 'idle_now', 'weight_sum', 'weight_rest', 'inserted', 'drawn', 'capacity', 'max_uses'}

-- Read the table's state at the start of a function; `close_table` writes changes back.
local function open_table(prefix)
  local t = {prefix = prefix, key = prefix .. ':replay:', uses = {}}
  local raw = redis.call('HMGET', t.key .. 'state', 'sampler', 'remover', unpack(COUNTERS))
  t.sampler, t.remover = raw[1], raw[2]
  for i, name in ipairs(COUNTERS) do t[name] = tonumber(raw[i + 2]) or 0 end
  t.now = {t['now:1'], t['now:2'], t['now:3'], t['now:4']}
  t.clocked = t.sampler == 'uniform' or t.sampler == 'prioritized'
  t.weighted = t.sampler == 'prioritized' or t.remover == 'lowest_priority'
  t.size = redis.call('ZCARD', t.key .. 'order')
  return t
end

local function close_table(t)
  local state = t.key .. 'state'
  if t.size == 0 then t.weight_sum, t.weight_rest = 0, 0 end
  local sum = t.weight_sum + t.weight_rest
  redis.call('HSET', state, 'now:1', t.now[1], 'now:2', t.now[2], 'now:3', t.now[3], 'now:4', t.now[4], 'idle_now', t.idle_now, 'weight_sum', sum,
    'weight_rest', t.weight_rest - (sum - t.weight_sum), 'inserted', t.inserted, 'drawn', t.drawn)
  for uses, change in pairs(t.uses) do
    if change ~= 0 and redis.call('HINCRBY', state, 'uses:' .. uses, change) == 0 then redis.call('HDEL', state, 'uses:' .. uses) end
  end
end

-- Change the number of groups that were drawn `uses` times; `close_table` writes it.
local function count_uses(t, uses, change)
  t.uses[uses] = (t.uses[uses] or 0) + change
end

-- Return the weight that drives a group's clock.
local function clock_weight(t, weight)
  return t.sampler == 'prioritized' and weight or 1
end

-- Parse and check a weight: one bad weight must not stop the clocks.
local function weight_of(text)
  local weight = tonumber(text)
  if weight and weight >= 0 and weight <= HEAVIEST then return weight < LIGHTEST and 0 or weight end
end

-- Add to the sum of weights, and the rounding error to the rest (Knuth's TwoSum): a light group must count correctly after a
-- heavy one has left.
local function add_weight(t, change)
  local sum = t.weight_sum + change
  local added = sum - t.weight_sum
  t.weight_rest = t.weight_rest + (t.weight_sum - (sum - added)) + (change - added)
  t.weight_sum = sum
end

-- Return the number of the clocks for a weight in LIGHTEST to HEAVIEST, 1 to CLOCKS (as in store/snapshot_format.py).
local function clock_of(weight)
  local _, exponent = math.frexp(weight)
  return math.floor((exponent - 1) / SPAN) + 3
end

-- Return the weight that drives the clock of a group in the table.
local function speed_of(t, group)
  return t.sampler == 'prioritized' and tonumber(redis.call('ZSCORE', t.key .. 'weight', group)) or 1
end

-- Restart the time of one set of clocks at 0, keeping the remaining time of each.
local function restart_clocks(t, n)
  local key = t.key .. 'clock:' .. n
  local groups = redis.call('ZRANGE', key, 0, -1, 'WITHSCORES')
  for i = 1, #groups, 2 do redis.call('ZADD', key, groups[i + 1] - t.now[n], groups[i]) end
  t.now[n] = 0
end

-- Set a group's clock; `variate` is Exp(1)-distributed. When time has moved so far that the rings of a group would all round to the
-- same value, the clocks of its set are restarted. Their weights differ by a factor of at most 2^16, so each of them has rung 2^16
-- times on average since the last restart, unless lighter groups moved time; then nearly all of the set have rung and were taken
-- out of it by the same draw. A restart of N clocks therefore costs nothing beside the 65,536 N draws before it.
local function wind(t, group, weight, variate)
  if weight > 0 then
    local n = clock_of(weight)
    if t.now[n] * weight > LONGEST then restart_clocks(t, n) end
    redis.call('ZADD', t.key .. 'clock:' .. n, t.now[n] + variate / weight, group)
  else
    redis.call('ZADD', t.key .. 'idle', t.idle_now + variate, group)
  end
end

-- Stop a group's clock.
local function unwind(t, group, weight)
  redis.call('ZREM', t.key .. (weight > 0 and 'clock:' .. clock_of(weight) or 'idle'), group)
end

local function enter_table(t, group, seq, oldest, weight, variate)
  redis.call('ZADD', t.key .. 'order', seq, group)
  redis.call('ZADD', t.key .. 'version', oldest * SHIFT + seq, group)
  if t.clocked then wind(t, group, clock_weight(t, weight), variate) end
  if t.weighted then
    redis.call('ZADD', t.key .. 'weight', weight, group)
    add_weight(t, weight)
  end
  count_uses(t, 0, 1)
  t.size, t.inserted = t.size + 1, t.inserted + 1
end

-- Remove a group from the table. Returns how often it was drawn.
local function leave_table(t, group)
  redis.call('ZREM', t.key .. 'order', group)
  redis.call('ZREM', t.key .. 'version', group)
  if t.clocked then unwind(t, group, speed_of(t, group)) end
  if t.weighted then
    add_weight(t, -tonumber(redis.call('ZSCORE', t.key .. 'weight', group)))
    redis.call('ZREM', t.key .. 'weight', group)
  end
  local uses = tonumber(redis.call('HGET', t.prefix .. ':group:' .. group, 'uses'))
  count_uses(t, uses, -1)
  t.size = t.size - 1
  return uses
end

-- Give groups new weights, all at once. `weights` has those of `names`; a clock keeps the rest of its variate.
local function change_weights(t, names, weights)
  local old, sets, heaviest = redis.call('ZMSCORE', t.key .. 'weight', unpack(names)), {}, {}
  local scores, added = {}, {}
  for i, group in ipairs(names) do
    local was, weight = tonumber(old[i]), weights[i]
    if was ~= weight then
      scores[#scores + 1], scores[#scores + 2] = weight, group
      add_weight(t, -was)
      add_weight(t, weight)
      local from, to = was > 0 and clock_of(was) or 0, weight > 0 and clock_of(weight) or 0
      sets[from] = sets[from] or {}
      table.insert(sets[from], {group = group, was = was, weight = weight, to = to})
      heaviest[to] = math.max(heaviest[to] or 0, weight)
    end
  end
  call_over(scores, 'ZADD', t.key .. 'weight')
  if t.sampler ~= 'prioritized' then return end
  for n, weight in pairs(heaviest) do
    if n > 0 and t.now[n] * weight > LONGEST then restart_clocks(t, n) end
  end
  for from, moving in pairs(sets) do
    local key, now, groups = t.key .. (from > 0 and 'clock:' .. from or 'idle'), from > 0 and t.now[from] or t.idle_now, {}
    for i, each in ipairs(moving) do groups[i] = each.group end
    for i, rings in ipairs(redis.call('ZMSCORE', key, unpack(groups))) do
      local each = moving[i]
      local rest = math.max((tonumber(rings) - now) * (from > 0 and each.was or 1), 0)
      local list = added[each.to] or {}
      list[#list + 1] = each.to > 0 and t.now[each.to] + rest / each.weight or t.idle_now + rest
      list[#list + 1], added[each.to] = each.group, list
    end
    call_over(groups, 'ZREM', key)
  end
  for to, list in pairs(added) do call_over(list, 'ZADD', t.key .. (to > 0 and 'clock:' .. to or 'idle')) end
end

-- Multiply the weights of groups issued after `after`, at most SCALED_TOGETHER of them, so that the server stays responsive. Returns
-- how many, and the sequence of the last one. A table without weights has none to multiply.
local function scale_weights(t, factor, after)
  if not t.weighted then return 0 end
  local found = redis.call('ZRANGE', t.key .. 'order', '(' .. after, '+inf', 'BYSCORE', 'LIMIT', 0, SCALED_TOGETHER, 'WITHSCORES')
  local names, weights = {}, {}
  for i = 1, #found, 2 do names[#names + 1] = found[i] end
  if #names == 0 then return 0 end
  for i, weight in ipairs(redis.call('ZMSCORE', t.key .. 'weight', unpack(names))) do
    local scaled = tonumber(weight) * factor
    weights[i] = scaled < LIGHTEST and 0 or math.min(scaled, HEAVIEST)
  end
  change_weights(t, names, weights)
  return #names, found[#found]
end

-- By name of the sampler: its first `n` groups.
local FIRST = {
  fifo = function(t, n) return redis.call('ZRANGE', t.key .. 'order', 0, n - 1) end,
  lifo = function(t, n) return redis.call('ZREVRANGE', t.key .. 'order', 0, n - 1) end,
  freshest = function(t, n) return redis.call('ZREVRANGE', t.key .. 'version', 0, n - 1) end,
}
FIRST.uniform = function(t, n)
  local rings, groups = {}, {}
  for clock = 1, CLOCKS do
    local found = redis.call('ZRANGE', t.key .. 'clock:' .. clock, 0, n - 1, 'WITHSCORES')
    for i = 1, #found, 2 do rings[#rings + 1] = {found[i], found[i + 1] - t.now[clock]} end
  end
  table.sort(rings, function(a, b)
    if a[2] == b[2] then return a[1] < b[1] end
    return a[2] < b[2]
  end)
  for i = 1, math.min(n, #rings) do groups[i] = rings[i][1] end
  if #groups < n then
    for _, group in ipairs(redis.call('ZRANGE', t.key .. 'idle', 0, n - #groups - 1)) do groups[#groups + 1] = group end
  end
  return groups
end
FIRST.prioritized = FIRST.uniform

-- Return the sampler's first `n` groups; to the commands above, 0 would mean all.
local function first_groups(t, n)
  return n > 0 and FIRST[t.sampler](t, n) or {}
end

-- Advance time to the last ring of these groups, which are the first to ring, and give them new variates.
local function ring_clocks(t, groups, variates)
  local speeds, passed = {}, 0
  for i, group in ipairs(groups) do
    speeds[i] = speed_of(t, group)
    if speeds[i] > 0 then
      local n = clock_of(speeds[i])
      passed = math.max(passed, tonumber(redis.call('ZSCORE', t.key .. 'clock:' .. n, group)) - t.now[n])
    else
      t.idle_now = math.max(t.idle_now, tonumber(redis.call('ZSCORE', t.key .. 'idle', group)))
    end
  end
  for i, group in ipairs(groups) do
    if speeds[i] > 0 then redis.call('ZREM', t.key .. 'clock:' .. clock_of(speeds[i]), group) end -- not to be restarted with the rest
  end
  for n = 1, CLOCKS do t.now[n] = t.now[n] + passed end
  for i, group in ipairs(groups) do wind(t, group, speeds[i], variates[i]) end
end

-- By name of the remover: the group that leaves a full table.
local REMOVERS = {
  fifo = function(t) return redis.call('ZRANGE', t.key .. 'order', 0, 0)[1] end,
  lowest_priority = function(t) return redis.call('ZRANGE', t.key .. 'weight', 0, 0)[1] end,
  stalest = function(t) return redis.call('ZRANGE', t.key .. 'version', 0, 0)[1] end,
}

local function delete_group(prefix, group)
  local key = prefix .. ':group:' .. group
  redis.call('UNLINK', prefix .. ':payload:' .. (redis.call('HGET', key, 'payload') or ''), key)
end

-- Remove a group with an outcome. A group that was trained already has its outcome, and a checkpoint may still need it.
local function drop_group(t, group, outcome)
  if leave_table(t, group) > 0 then
    redis.call('RPUSH', t.prefix .. ':departed', group)
    return
  end
  local key = t.prefix .. ':group:' .. group
  local kept = redis.call('HMGET', key, 'header', 'payload')
  if keep_sample(t.prefix, group, outcome, kept[1] or '', kept[2] or '') then
    redis.call('UNLINK', key)
  else
    delete_group(t.prefix, group)
  end
  remember_drop(t.prefix, group, outcome)
  count(t.prefix, outcome, 1)
  free_slots(t.prefix, 1)
end

local function words(text)
  local list = {}
  for word in string.gmatch(text, '%S+') do list[#list + 1] = word end
  return list
end
