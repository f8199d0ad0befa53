-- The replay table: how groups enter, are drawn, weighted and removed. Shared by replay.lua and steps.lua.
-- reads and writes: ledger, run, group:<group>, payload:<payload>
-- owns:             replay:order   zset  group -> issue sequence
--                   replay:version zset  group -> oldest policy version x 2^32 + issue sequence
--                   replay:clock   zset  group -> time it rings next, for weights above 0
--                   replay:idle    zset  the same for groups of weight 0, which are drawn when nothing else is left
--                   replay:weight  zset  group -> sampling weight
--                   replay:state   hash  sampler, remover, capacity, max_uses; now, idle_now (the clocks' time); weight_sum,
--                                        weight_rest (its rounding error); inserted, drawn; base (recency);
--                                        uses:<n> groups that were drawn n times
--                   departed       list  groups that left the table after use; the next plan takes charge of their payload
--
-- Poisson clocks: a group of weight w rings at now + Exp(1)/w. The first to ring is group i with probability w_i / sum of w, and
-- by memorylessness no other clock changes when a group is drawn, enters, leaves or changes its weight.

local SHIFT = 4294967296
local LIGHTEST, HEAVIEST = 1e-9, 1e9 -- as in services/algorithm/sampling_weights.py; lighter is 0
local LONGEST = 1048576 -- mean rings of a group: up to there a double resolves ring times to 2^-32 of one
local COUNTERS = {'now', 'idle_now', 'weight_sum', 'weight_rest', 'inserted', 'drawn', 'capacity', 'max_uses'}

-- Read the table's state at the start of a function; `close_table` writes changes back.
local function open_table(prefix)
  local t = {prefix = prefix, key = prefix .. ':replay:', uses = {}}
  local raw = redis.call('HMGET', t.key .. 'state', 'sampler', 'remover', unpack(COUNTERS))
  t.sampler, t.remover = raw[1], raw[2]
  for i, name in ipairs(COUNTERS) do t[name] = tonumber(raw[i + 2]) or 0 end
  t.clocked = t.sampler == 'uniform' or t.sampler == 'prioritized'
  t.weighted = t.sampler == 'prioritized' or t.remover == 'lowest_priority'
  t.size = redis.call('ZCARD', t.key .. 'order')
  return t
end

local function close_table(t)
  local state = t.key .. 'state'
  if t.size == 0 then t.weight_sum, t.weight_rest = 0, 0 end
  local sum = t.weight_sum + t.weight_rest
  redis.call('HSET', state, 'now', t.now, 'idle_now', t.idle_now, 'weight_sum', sum,
    'weight_rest', t.weight_rest - (sum - t.weight_sum), 'inserted', t.inserted, 'drawn', t.drawn)
  for uses, change in pairs(t.uses) do
    if change ~= 0 and redis.call('HINCRBY', state, 'uses:' .. uses, change) == 0 then redis.call('HDEL', state, 'uses:' .. uses) end
  end
end

local function tally(t, uses, change)
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

-- Restart time at 0, keeping the remaining time of every clock.
local function restart_clocks(t)
  local groups = redis.call('ZRANGE', t.key .. 'clock', 0, -1, 'WITHSCORES')
  for i = 1, #groups, 2 do redis.call('ZADD', t.key .. 'clock', groups[i + 1] - t.now, groups[i]) end
  t.now = 0
end

-- Set a group's clock; `variate` is Exp(1)-distributed. When light groups have moved time so far that the rings of a heavy group
-- would all round to the same value, the clocks are restarted. That costs O(N) once in 2^20 draws or after such a change of
-- weights.
local function wind(t, group, weight, variate)
  if weight > 0 then
    if t.now * weight > LONGEST then restart_clocks(t) end
    redis.call('ZADD', t.key .. 'clock', t.now + variate / weight, group)
  else
    redis.call('ZADD', t.key .. 'idle', t.idle_now + variate, group)
  end
end

-- Stop a group's clock. Returns the rest of its variate: Exp(1)-distributed again, by memorylessness.
local function unwind(t, group, weight)
  local clock, now = 'clock', t.now
  if weight == 0 then clock, now, weight = 'idle', t.idle_now, 1 end
  local rings = tonumber(redis.call('ZSCORE', t.key .. clock, group))
  redis.call('ZREM', t.key .. clock, group)
  return math.max((rings - now) * weight, 0)
end

local function enter_table(t, group, seq, oldest, weight, variate)
  redis.call('ZADD', t.key .. 'order', seq, group)
  redis.call('ZADD', t.key .. 'version', oldest * SHIFT + seq, group)
  if t.clocked then wind(t, group, clock_weight(t, weight), variate) end
  if t.weighted then
    redis.call('ZADD', t.key .. 'weight', weight, group)
    add_weight(t, weight)
  end
  tally(t, 0, 1)
  t.size, t.inserted = t.size + 1, t.inserted + 1
end

-- Remove a group from the table. Returns how often it was drawn.
local function leave_table(t, group)
  redis.call('ZREM', t.key .. 'order', group)
  redis.call('ZREM', t.key .. 'version', group)
  if t.clocked and redis.call('ZREM', t.key .. 'clock', group) == 0 then redis.call('ZREM', t.key .. 'idle', group) end
  if t.weighted then
    add_weight(t, -tonumber(redis.call('ZSCORE', t.key .. 'weight', group)))
    redis.call('ZREM', t.key .. 'weight', group)
  end
  local uses = tonumber(redis.call('HGET', t.prefix .. ':group:' .. group, 'uses'))
  tally(t, uses, -1)
  t.size = t.size - 1
  return uses
end

local function change_weight(t, group, weight)
  local old = tonumber(redis.call('ZSCORE', t.key .. 'weight', group))
  if old == weight then return end
  if t.sampler == 'prioritized' then wind(t, group, weight, unwind(t, group, old)) end
  redis.call('ZADD', t.key .. 'weight', weight, group)
  add_weight(t, -old)
  add_weight(t, weight)
end

-- Multiply all weights, which changes no draw because time runs faster or slower by the same factor. Returns how many groups
-- there are.
local function scale_weights(t, factor)
  local key = t.key .. 'weight'
  redis.call('ZUNIONSTORE', key, 1, key, 'WEIGHTS', factor)
  if t.sampler == 'prioritized' then
    redis.call('ZUNIONSTORE', t.key .. 'clock', 1, t.key .. 'clock', 'WEIGHTS', 1 / factor)
    t.now = t.now / factor
  end
  local scaled = redis.call('ZRANGE', key, 0, -1, 'WITHSCORES')
  t.weight_sum, t.weight_rest = 0, 0
  for i = 2, #scaled, 2 do add_weight(t, scaled[i]) end
  for _, group in ipairs(redis.call('ZRANGEBYSCORE', key, '(0', '(' .. LIGHTEST)) do change_weight(t, group, 0) end
  return #scaled / 2
end

-- By name of the sampler: its first `n` groups.
local FIRST = {
  fifo = function(t, n) return redis.call('ZRANGE', t.key .. 'order', 0, n - 1) end,
  lifo = function(t, n) return redis.call('ZREVRANGE', t.key .. 'order', 0, n - 1) end,
  freshest = function(t, n) return redis.call('ZREVRANGE', t.key .. 'version', 0, n - 1) end,
}
FIRST.uniform = function(t, n)
  local groups = redis.call('ZRANGE', t.key .. 'clock', 0, n - 1)
  if #groups < n then
    for _, group in ipairs(redis.call('ZRANGE', t.key .. 'idle', 0, n - #groups - 1)) do groups[#groups + 1] = group end
  end
  return groups
end
FIRST.prioritized = FIRST.uniform

-- Advance time to the last ring of these groups, which are the first to ring, and give them new variates.
local function ring_clocks(t, groups, variates)
  local rung = {}
  for i, group in ipairs(groups) do
    local rings = redis.call('ZSCORE', t.key .. 'clock', group)
    rung[i] = rings
    if rings then
      t.now = math.max(t.now, tonumber(rings))
    else
      t.idle_now = math.max(t.idle_now, tonumber(redis.call('ZSCORE', t.key .. 'idle', group)))
    end
  end
  for i, group in ipairs(groups) do
    local weight = 0
    if rung[i] then weight = t.sampler == 'prioritized' and tonumber(redis.call('ZSCORE', t.key .. 'weight', group)) or 1 end
    wind(t, group, weight, variates[i])
  end
end

-- By name of the remover: the group that leaves a full table. `victim` is uniform in 0..1.
local REMOVERS = {
  fifo = function(t) return redis.call('ZRANGE', t.key .. 'order', 0, 0)[1] end,
  lifo = function(t) return redis.call('ZRANGE', t.key .. 'order', -1, -1)[1] end,
  lowest_priority = function(t) return redis.call('ZRANGE', t.key .. 'weight', 0, 0)[1] end,
  stalest = function(t) return redis.call('ZRANGE', t.key .. 'version', 0, 0)[1] end,
  uniform = function(t, victim)
    local rank = math.min(math.floor(victim * t.size), t.size - 1)
    return redis.call('ZRANGE', t.key .. 'order', rank, rank)[1]
  end,
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
  delete_group(t.prefix, group)
  remember_drop(t.prefix, group, outcome)
  count(t.prefix, outcome, 1)
  free_slots(t.prefix, 1)
end

local function words(text)
  local list = {}
  for word in string.gmatch(text, '%S+') do list[#list + 1] = word end
  return list
end
