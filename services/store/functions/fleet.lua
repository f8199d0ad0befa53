-- Fleet and weight-sync rounds: live pods, and the round they take part in.
-- reads and writes: run, claimed, tickets and tickets:rollouts (their consumers)
-- owns:             fleet        zset  member -> last heartbeat, ms of the run's time
--                   fleet:status hash  member -> PodStatus
--                   fleet:claimers zset generators that share the training tickets -> last heartbeat, ms
--                   sync         hash  attempt; round; mark "<fence> <attempt> <phase>"; answers (their number in this phase);
--                                      opened "<fence> <ordinal>"; ack:<member> -> "<stage> <detail>"; acked:<member> ->
--                                      "<member> <ordinal>"
--                   sync:ranks   hash  member of the round -> its first rank

local GROUPS = {[':tickets'] = 'generators', [':tickets:rollouts'] = 'environments'}

local function forget(prefix, member)
  local name = string.match(member, '^(.*):') or member
  redis.call('ZREM', prefix .. ':fleet', member)
  redis.call('ZREM', prefix .. ':fleet:claimers', member)
  redis.call('HDEL', prefix .. ':fleet:status', member)
  redis.call('HDEL', prefix .. ':claimed', name)
  if redis.call('EXISTS', prefix .. ':run') == 0 then return end
  for stream, group in pairs(GROUPS) do delete_consumer(prefix .. stream, group, name) end
end

-- Forget the members of the pod `name`: a new process replaces them, however recent their heartbeat.
local function forget_former(prefix, name)
  for _, member in ipairs(redis.call('ZRANGE', prefix .. ':fleet', 0, -1)) do
    if string.match(member, '^(.*):') == name then
      forget(prefix, member)
    end
  end
end

-- args: member (`<pod>:<boot>`), status, ttl ms, 1 if it shares the training tickets. Renews a heartbeat, and forgets a pod's
-- former process and members silent for ten ttl. Returns how many generators share the tickets.
register('beat', {'member', TEXT, 'status', TEXT, 'ttl ms', NATURAL, 'shares', FLAG}, function(prefix, args)
  local now = run_ms(prefix)
  if redis.call('HEXISTS', prefix .. ':fleet:status', args[1]) == 0 then
    forget_former(prefix, string.match(args[1], '^(.*):'))
    notify(prefix, 'fleet')
  end
  redis.call('ZADD', prefix .. ':fleet', now, args[1])
  redis.call('HSET', prefix .. ':fleet:status', args[1], args[2])
  if args[4] == '1' then
    redis.call('ZADD', prefix .. ':fleet:claimers', now, args[1])
  else
    redis.call('ZREM', prefix .. ':fleet:claimers', args[1])
  end
  for _, gone in ipairs(redis.call('ZRANGE', prefix .. ':fleet', '-inf', now - 10 * tonumber(args[3]), 'BYSCORE')) do
    forget(prefix, gone)
  end
  return redis.call('ZCOUNT', prefix .. ':fleet:claimers', now - tonumber(args[3]), '+inf')
end)

-- args: member. Removes a pod, and its consumers unless some of their leases still have to expire.
register('leave', {'member', TEXT}, function(prefix, args)
  forget(prefix, args[1])
  notify(prefix, 'fleet')
  return 1
end)

-- args: ttl ms. Returns {age ms, status, …} of the members with a heartbeat within it.
register('members', {'ttl ms', NATURAL}, function(prefix, args)
  local now, result = run_ms(prefix), {}
  local seen = redis.call('ZRANGE', prefix .. ':fleet', now - tonumber(args[1]), '+inf', 'BYSCORE', 'WITHSCORES')
  for i = 1, #seen, 2 do
    result[#result + 1] = now - tonumber(seen[i + 1])
    result[#result + 1] = redis.call('HGET', prefix .. ':fleet:status', seen[i])
  end
  return result
end)

-- args: trainer fence, ordinal of the call, attempt, phase, round without its members, then member and first rank of each. Opens or
-- advances a round; a new attempt deletes the acknowledgements of the old one. Answers are counted from 0 in every phase. Returns
-- 0, without effect, if a later call has come before.
register_trainer('round', {
  'ordinal', NATURAL, 'attempt', NATURAL, 'phase', TEXT, 'round', TEXT, EACH, 'member', TEXT, 'first rank', NATURAL,
}, function(prefix, args)
  local key, ranks = prefix .. ':sync', prefix .. ':sync:ranks'
  if overtaken(key, 'opened', args[1], args[2]) then return 0 end
  local mark = args[1] .. ' ' .. args[3] .. ' ' .. args[4]
  if redis.call('HGET', key, 'attempt') ~= args[3] then redis.call('DEL', key) end
  if redis.call('HGET', key, 'mark') ~= mark then redis.call('HSET', key, 'answers', 0) end
  redis.call('HSET', key, 'attempt', args[3], 'round', args[5], 'mark', mark, 'opened', args[1] .. ' ' .. args[2])
  redis.call('DEL', ranks)
  for i = 6, #args, 2 do
    redis.call('HSET', ranks, args[i], args[i + 1])
  end
  notify(prefix, 'sync')
  return 1
end)

-- args: member, mark of the round it knows. Returns 1 while that is the current round, otherwise {round, the member's first
-- rank}, either of which may be nil. Reading the ranks of all members would cost a fleet the square of its size.
register('round_of', {'member', TEXT, 'mark', TEXT}, function(prefix, args)
  local current = redis.call('HMGET', prefix .. ':sync', 'mark', 'round')
  if current[1] == args[2] then return 1 end
  return {current[2], redis.call('HGET', prefix .. ':sync:ranks', args[1])}
end)

-- args: member, attempt, ordinal of the member's call, stage, detail. Returns 0 if the round is over. Notifies at the last answer of
-- a phase and any later one: a trainer that read all answers after each would read the square of its fleet. A call that comes
-- after a later one, or again, changes nothing.
register('acknowledge', {'member', TEXT, 'attempt', NATURAL, 'ordinal', NATURAL, 'stage', TEXT, 'detail', TEXT}, function(prefix, args)
  local key = prefix .. ':sync'
  if redis.call('HGET', key, 'attempt') ~= args[2] then return 0 end
  if overtaken(key, 'acked:' .. args[1], args[1], args[3]) then return 1 end
  redis.call('HSET', key, 'ack:' .. args[1], args[4] .. ' ' .. args[5])
  if redis.call('HINCRBY', key, 'answers', 1) >= redis.call('HLEN', prefix .. ':sync:ranks') then notify(prefix, 'acks') end
  return 1
end)
